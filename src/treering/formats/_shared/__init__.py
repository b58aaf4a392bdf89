"""Code that several formats share. It contains no format of its own."""
