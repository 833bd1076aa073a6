"""What a plan costs: time and memory, predicted from the rules and the redistributions."""
