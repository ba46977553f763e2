"""The papers' tables and figures next to ours."""
