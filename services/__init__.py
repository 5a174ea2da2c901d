"""Everything with an edge: settings, Ray Serve, the FastAPI gateway, metrics, command line, benchmarks."""
