"""Export: a model handed to other engines, and what they answer compared with what it answers here."""
