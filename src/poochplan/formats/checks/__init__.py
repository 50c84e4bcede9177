"""What is checked of a file when it is read: the range of each field, and of fields against each other."""
