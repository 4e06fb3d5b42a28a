"""What Flower runs for Hansa: an app that only hands bytes on. Nothing in here imports torch, or anything of Hansa."""

from pathlib import Path

APP = Path(__file__).parent
"""The folder of the app."""
