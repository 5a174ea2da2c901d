"""`dspark calibrate` and `dspark evaluate`: drafters measured on real rounds of the engine in this process."""
