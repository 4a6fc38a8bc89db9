"""``lockstep bench decode``: what a decode step takes, through the whole product."""
