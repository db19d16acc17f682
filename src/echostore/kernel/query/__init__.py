"""Queries: what a query is, how it is answered once, and how an answer is kept up to date.

`source` is what queries read: the rows and edges of one party. `order` is the total order over values of all kinds,
`fields` are places in a row, `filters` are conditions on it and `expressions` how a person writes them. `spec` puts a
whole query together. `evaluate` answers it from nothing, `live` from the previous answer and what changed; the parts of
a live query are `membership` (which items, by `edges`) and `window` and `reduce` (what is seen of them).
"""
