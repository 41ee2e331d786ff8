"""Warden and agent."""
