"""Checkpoints and weights of others: conversion, export, comparison, foreign files."""
