"""A simulated world for tests: peers, network, disk, clock and checkers. A public package that nothing imports."""
