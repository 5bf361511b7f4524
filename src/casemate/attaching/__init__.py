"""What an attached collection needs beside it: one pass over its rows, and a place for what came out."""
