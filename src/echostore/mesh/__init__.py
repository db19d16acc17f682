"""Peers on a network: authenticated channels, replication over them, invitations, blobs.

    Node            listens, dials, keeps one connection per device          node.py
    Connection      one authenticated stream of frames                       connection.py
    SecureChannel   Noise XX, bound to Ed25519 device keys; no sockets       secure_channel.py

What a peer offers to the mesh is the protocol `MeshPeer`; the mesh knows no party beyond it.
"""
