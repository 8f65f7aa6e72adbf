"""What models write in a reply besides words, thoughts and calls, each form in one file."""
