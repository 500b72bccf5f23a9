"""Models of other packages, converted to ours."""
