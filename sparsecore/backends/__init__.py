"""Backends that execute lookups and fused updates."""
