"""All drawing: figures from plain values, without imports from the subpackages that measure or train."""
