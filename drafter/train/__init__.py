"""Training of drafters: corpus, target states, losses, loop."""
