"""All-reduce algorithms behind one protocol, and the choice between them."""
