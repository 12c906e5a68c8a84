"""Other engines on the same requests, each in a virtual environment of its own."""
