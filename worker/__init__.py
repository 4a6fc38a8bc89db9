"""What one rank does in a step, and the scheduler that plans it."""
