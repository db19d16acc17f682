"""The stages of the pipeline, each one module: what goes in, what comes out, what can be wrong with it."""
