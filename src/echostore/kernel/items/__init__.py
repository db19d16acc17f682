"""Items: their records, their tree, and how messages reach them."""
