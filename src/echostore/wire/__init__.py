"""Bytes: protobuf schema <-> kernel values, hashing, signing, CIDs."""
