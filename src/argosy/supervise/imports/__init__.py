"""What a script will import, and which zygote has it."""
