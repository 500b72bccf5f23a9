"""All drawing: figures from plain values, without imports from the rooms that measure or train."""
