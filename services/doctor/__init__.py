"""`dspark doctor`: what of a machine or a deployment would not work, or not well, and what to do about it."""
