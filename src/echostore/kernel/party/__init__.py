"""Who belongs to a party and which feeds count: credentials and the machine that folds them."""
