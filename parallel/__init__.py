"""Which rank owns what, and what ranks must agree on."""
