"""A live view of a server, made of what it tells Prometheus."""
