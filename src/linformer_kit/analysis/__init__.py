"""What a trained model does inside: the spectrum of its attention."""
