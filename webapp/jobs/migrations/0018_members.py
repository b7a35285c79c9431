import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('catalog', '0013_several_devices'),
        ('jobs', '0017_unequal_devices'),
    ]

    operations = [
        migrations.AddField(
            model_name='job',
            name='joined',
            field=models.ManyToManyField(related_name='joined_jobs', to='catalog.machine'),
        ),
        migrations.CreateModel(
            name='Member',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('machine_name', models.CharField(max_length=200)),
                ('ranks', models.JSONField()),
                ('devices', models.JSONField()),
                ('device_bytes', models.JSONField()),
                ('worker', models.CharField(blank=True, max_length=200)),
                ('lease_until', models.DateTimeField(null=True)),
                ('is_draining', models.BooleanField(default=False)),
                ('is_lost', models.BooleanField(default=False)),
                ('trouble', models.TextField(blank=True)),
                ('ended_at', models.DateTimeField(null=True)),
                ('attempt', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='members', to='jobs.attempt')),
                ('machine', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.SET_NULL, to='catalog.machine')),
            ],
            options={
                'ordering': ['attempt', 'id'],
                'indexes': [models.Index(fields=['machine', 'ended_at'], name='member_of_machine')],
                'constraints': [models.UniqueConstraint(fields=('attempt', 'machine_name'), name='member_once_per_machine')],
            },
        ),
    ]
