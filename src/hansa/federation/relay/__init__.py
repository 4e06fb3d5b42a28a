"""The app that Flower runs for Hansa. It only relays bytes and imports neither torch nor the rest of Hansa."""

from pathlib import Path

APP = Path(__file__).parent
"""The folder of the app."""
