"""All drawing: figures from plain values. Nothing here imports from the rooms that measure or train."""
