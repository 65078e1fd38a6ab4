"""Codecs, exchanges and the driver that brings them to the wire."""
