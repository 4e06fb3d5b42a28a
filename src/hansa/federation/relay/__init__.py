"""The app that Flower runs for Hansa: it only relays bytes. Nothing in here imports torch or the rest of Hansa."""

from pathlib import Path

APP = Path(__file__).parent
"""The folder of the app."""
