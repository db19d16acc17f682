"""The replication protocol, without sockets: a session takes events and returns effects."""
