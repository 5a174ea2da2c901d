"""Draft models from training to serving: DSpark, DFlash, n-gram; checkpoints, proposing, calibration."""
