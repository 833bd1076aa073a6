"""What a rank does in its steps, and what it measures; and one device's truth to compare with."""
