"""The form that a request's text must have, token by token. No torch; llguidance does the work."""
