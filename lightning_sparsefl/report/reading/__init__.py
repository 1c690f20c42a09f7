"""Reading of run folders: their tables, their options, and how runs belong together."""
