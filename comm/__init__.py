"""How bytes move between ranks and processes."""
