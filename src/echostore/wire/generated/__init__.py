"""Generated from `wire/schema` by `make proto`; never edited."""
