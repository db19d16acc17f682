"""Pure rules: values in, values out. No I/O, clock, randomness, async or logging."""
