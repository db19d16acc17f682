"""The public API: Peer, Party, Item, Query, streams and receipts, over the live PartyProcessor."""
