"""Captured calls as FlashInfer's flight recorder would have written them, for its own replay tool."""
