"""What is kept on disk: FeedStore, MetaStore, ItemStore, KeyStore, BlobStore."""
