"""Checkpoints of other programs: conversion, export, comparison, and their file formats."""
