"""How Lockstep is started, reached and watched; the only place that imports ray."""
