"""The target model and everything that must agree with it: weights, paged KV, sampling transform, acceptance."""
