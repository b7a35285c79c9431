"""The chat model that ships with the program; ``make_chat_model.py`` made it from the bundled text."""

from pathlib import Path

CHAT_MODEL_NAME = "headroom-chat-4m"
CHAT_MODEL_FOLDER = Path(__file__).parent / CHAT_MODEL_NAME
