"""Which graph serves a batch (pure), and how it is captured and replayed."""
