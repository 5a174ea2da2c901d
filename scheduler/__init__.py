"""Requests' lives, KV blocks, the cost curve and the admission rule. Knows numpy and nothing of torch, ray, HTTP or text."""
