"""What was measured and trained, to look at: pictures, one page about everything, the spectrum of a model's attention."""
