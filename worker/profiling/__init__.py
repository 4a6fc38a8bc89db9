"""What a step does on the device, operation by operation."""
